"""Who may call what: identities of callers, rules by method and by node, and what they refuse."""
