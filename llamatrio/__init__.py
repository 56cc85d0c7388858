"""llamatrio: an LLM server for GGUF models on Trio."""
