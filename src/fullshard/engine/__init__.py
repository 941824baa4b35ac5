"""The engine: units of parameters that are gathered, computed with, reduced and freed."""
