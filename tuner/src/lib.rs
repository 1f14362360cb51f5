//! Measuring policies against the full cache.
