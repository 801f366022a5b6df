"""What a body does that no dispatch mode sees: each file finds one such thing and tells the watch.

Methods of torch's classes are replaced while a body is watched, by ones that note the question and then ask torch.
Invariant: the answer is torch's, and after the run every method is the one that was there.
"""
