"""What failures and watching for them cost."""
