"""A LightningModule as a Task. Lightning is not imported here: the module does that."""
