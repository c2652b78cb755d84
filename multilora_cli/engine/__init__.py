"""The engine: schedule, run, postprocess. Token ids in, token ids out."""
