"""The modules that an engine needs and that take long to import; see `spawn`."""

import torch  # noqa: F401

import cbatch.engine.build
import cbatch.process.factory
import cbatch.process.server  # noqa: F401
