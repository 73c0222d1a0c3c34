"""Chat templates: Jinja programs in checkpoints that turn conversations into text."""
