"""Model files on disk, in any of three formats, as one: a config and Meta-named tensors."""
