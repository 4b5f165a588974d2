"""The commands, one module each; they import what they need when they run, so that --help answers at once."""
