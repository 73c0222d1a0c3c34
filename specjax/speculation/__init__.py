"""One round of speculation: draft, verify, accept, commit."""
