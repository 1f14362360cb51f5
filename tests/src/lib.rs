//! Helpers of the workspace-level tests.

pub mod tiny_model;
