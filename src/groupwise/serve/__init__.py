"""An OpenAI-compatible endpoint on our own engine. Start with `server`."""
