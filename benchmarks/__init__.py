"""One runnable script per claim; results are JSON with the machine, the versions and the commit."""
