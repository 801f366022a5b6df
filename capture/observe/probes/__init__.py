"""What a body does that no dispatch mode sees. Each file finds one such thing and reports it to the watch.

While a body is watched, methods of torch's classes are replaced by wrappers that note the call and then call torch's
method.

Invariant: the result is torch's, and after the run every method is the one that was there before.
"""
