"""Programs of other libraries beside eager: ``make test-world``."""
