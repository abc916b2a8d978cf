"""The room `objective`: surrogates and log-probabilities; torch only."""
