"""The parts of the configuration that have a file of their own; `adora_vl.config` puts them together."""
