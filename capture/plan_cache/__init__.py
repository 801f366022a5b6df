"""Plans on disk, so that another process records without a watched run.

In: annotation, function, key. Out: a plan whose fingerprint is that of this process, or none. Invariant: a file is
JSON, never code and never pickle; what is damaged, stale or of another version is named and not used. The recording
checks the plan all the same, so that a wrong file costs time, not numbers.
"""
