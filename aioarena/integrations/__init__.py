"""aioarena inside other projects. Nothing here is imported unless it is asked for."""
