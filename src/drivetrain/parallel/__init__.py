"""How ranks are arranged, and how a model is spread over them."""
