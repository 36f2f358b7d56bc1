"""Saying less on the wire: how ddp's gradients are made smaller for the way between ranks."""
