//! The CPU backend.

pub mod pool;
