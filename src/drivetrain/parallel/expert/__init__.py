"""ep: experts distributed over ranks; tokens are sent to them and back."""
