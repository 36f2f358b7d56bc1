"""ep: the experts of a model's layers, spread over ranks; tokens travel to them and back."""
