"""How ranks are arranged, and how a model is distributed over them."""
