//! The CPU backend.

pub(crate) mod dot;
pub mod gemm;
pub mod gemv;
pub mod pool;
