"""Chat templates: Jinja programs of a checkpoint's author, in which conversations become text."""
