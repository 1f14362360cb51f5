//! What the tests of the model code share.
#![allow(dead_code, reason = "each test uses a part")]

#[path = "../../../tests/src/tiny_model.rs"]
pub mod tiny_model;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use forebay::model::Model;

/// SmolLM2, from `FOREBAY_MODEL_SMOLLM2` or `models/`; where it is in neither, the test says so and is skipped.
pub fn smollm2() -> Option<&'static Model> {
    static MODEL: LazyLock<Option<Model>> =
        LazyLock::new(|| open("FOREBAY_MODEL_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf"));
    MODEL.as_ref()
}

/// Qwen2.5-Coder-0.5B, from `FOREBAY_MODEL_QWEN` or `models/`.
pub fn qwen() -> Option<&'static Model> {
    static MODEL: LazyLock<Option<Model>> =
        LazyLock::new(|| open("FOREBAY_MODEL_QWEN", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf"));
    MODEL.as_ref()
}

#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn open(variable: &str, file: &str) -> Option<Model> {
    let path = std::env::var_os(variable).map_or_else(|| root().join("models").join(file), PathBuf::from);
    if path.exists() {
        return Some(Model::open(&path).expect("the model opens"));
    }
    eprintln!("skipped: {} is not there and {variable} is not set", path.display());
    None
}

/// The golden values of SmolLM2.
pub fn golden_smollm2() -> serde_json::Value {
    golden("golden-smollm2.json")
}

/// The golden values of Qwen2.5-Coder-0.5B.
pub fn golden_qwen() -> serde_json::Value {
    golden("golden-qwen2.5-coder-0.5b.json")
}

fn golden(file: &str) -> serde_json::Value {
    let text = std::fs::read_to_string(root().join("tests/data").join(file)).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A list of token ids.
pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
