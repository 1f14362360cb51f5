//! What the tests of the model code share.
#![allow(dead_code, reason = "each test uses a part")]

#[path = "../../../tests/src/tiny_model.rs"]
pub mod tiny_model;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use forebay::model::Model;

const SMOLLM2: &str = "SmolLM2-135M-Instruct.Q4_1.gguf";

/// SmolLM2, from `FOREBAY_MODEL_SMOLLM2` or `models/`; where it is in neither, the test says so and is skipped.
#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
pub fn smollm2() -> Option<&'static Model> {
    static MODEL: LazyLock<Option<Model>> = LazyLock::new(|| {
        let path = match std::env::var_os("FOREBAY_MODEL_SMOLLM2") {
            Some(path) => PathBuf::from(path),
            None => root().join("models").join(SMOLLM2),
        };
        match path.exists() {
            true => Some(Model::open(&path).expect("SmolLM2 opens")),
            false => {
                eprintln!("skipped: {} is not there and FOREBAY_MODEL_SMOLLM2 is not set", path.display());
                None
            }
        }
    });
    MODEL.as_ref()
}

/// The golden values of SmolLM2.
pub fn golden_smollm2() -> serde_json::Value {
    let text = std::fs::read_to_string(root().join("tests/data/golden-smollm2.json")).unwrap();
    serde_json::from_str(&text).unwrap()
}

/// A list of token ids.
pub fn ids(value: &serde_json::Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn root() -> &'static Path {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap()
}
