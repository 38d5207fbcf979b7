"""One file a method. `--method NAME` takes methods/NAME.py; ncl.py is the interface, and the place to start."""
