//! Measuring cache policies against the full cache: [`evaluate`] by the next token's distribution, [`needle`] by retrieval.

pub mod divergence;
pub mod evaluate;
pub mod needle;
