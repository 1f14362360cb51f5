//! Helpers of the workspace-level tests.

pub mod golden;
pub mod tiny_model;
