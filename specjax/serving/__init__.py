"""An OpenAI-compatible server over one batch of rows; `specjax serve` starts it."""
