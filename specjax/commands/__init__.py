"""The commands of the command line, one file each: `add` describes it to the parser."""
