"""Ways to use the engine on models that know nothing of groups, chunks and iterations."""
