//! The CPU backend.

pub mod activations;
mod arch;
pub mod attention;
pub mod convert;
pub mod covariance;
pub mod dense;
pub(crate) mod dot;
pub mod gemm;
pub mod gemv;
pub mod norm;
mod parts;
pub mod pool;
pub mod prefill_attention;
pub mod rope;
pub mod select;
pub mod sketch;
mod tile;
