"""One file a library. ``PROGRAMS``: by name, a function that gets ``wrap``, which captures or does nothing, and gives a
step, called with its number, and switches of the library, thrown one after the other between rounds of steps."""
