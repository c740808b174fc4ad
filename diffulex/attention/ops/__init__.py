"""Operations of the attention layer, one folder each: the definition, the fast forms, the choice."""
