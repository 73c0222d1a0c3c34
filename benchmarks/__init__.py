"""One script per claim. A result is JSON with the machine, the versions and the commit."""
