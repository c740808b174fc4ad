"""Operations of expert layers, a folder each."""
