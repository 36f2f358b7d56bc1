"""Drop-in trainers: thin presets over Trainer, under the names that engines' users know."""
