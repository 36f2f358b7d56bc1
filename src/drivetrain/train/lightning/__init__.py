"""A LightningModule as a Task. Nothing of Lightning's is imported: the module brings it."""
