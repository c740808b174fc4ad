"""Engine parts of `multi_bd`; all of them are the templates as they stand."""
