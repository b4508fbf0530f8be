"""Structured output: grammars compiled to tables on the device, or matched on the host."""
