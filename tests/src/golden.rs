//! Golden values of two models: what the peer and exact f32 arithmetic say (`tests/data`, made by `make_golden.py`).

use serde::Deserialize;
use std::path::{Path, PathBuf};

/// A greedy continuation of the peer.
#[derive(Deserialize)]
pub struct GreedyCase {
    /// The prompt.
    pub prompt: String,
    /// Its tokens.
    pub prompt_ids: Vec<u32>,
    /// The peer's continuation.
    pub greedy_ids: Vec<u32>,
    /// Difference of the peer's first and second logit at each token.
    pub margin_to_second_logit: Vec<f32>,
}

/// One text of 512 tokens under exact arithmetic.
#[derive(Deserialize)]
pub struct GoldenLogits {
    /// Tokens of the text.
    pub ids: Vec<u32>,
    /// Positions of `exact_top32_logprobs`.
    pub positions: Vec<usize>,
    /// Mean KL divergence from exact arithmetic to the peer.
    pub kl_exact_to_llama_cpp_mean: f64,
    /// The 32 largest log-probabilities, with their tokens.
    pub exact_top32_logprobs: Vec<Vec<(usize, f64)>>,
    /// Arg-max after every token.
    pub exact_argmax_all_positions: Vec<usize>,
    /// Negative log-likelihood of every token but the first.
    pub exact_nll_next_token: Vec<f64>,
}

/// All golden values.
#[derive(Deserialize)]
pub struct Golden {
    /// Ten continuations.
    pub greedy: Vec<GreedyCase>,
    /// One text.
    pub logits: GoldenLogits,
}

/// The values for SmolLM2-135M-Instruct Q4_1.
pub fn golden_smollm2() -> Golden {
    serde_json::from_str(include_str!("../data/golden-smollm2.json")).expect("the committed file is valid")
}

/// The values for Qwen2.5-Coder-0.5B-Instruct Q4_K_M: architecture `qwen2`, K-quants.
pub fn golden_qwen() -> Golden {
    serde_json::from_str(include_str!("../data/golden-qwen2.5-coder-0.5b.json")).expect("the committed file is valid")
}

/// The small model: `FOREBAY_MODEL_SMOLLM2`, else where `examples/fetch_model.sh` puts it. `None` is said on standard error.
pub fn smollm2() -> Option<PathBuf> {
    model("FOREBAY_MODEL_SMOLLM2", "SmolLM2-135M-Instruct.Q4_1.gguf")
}

/// The larger model: `FOREBAY_MODEL_QWEN`, else where `examples/fetch_model.sh qwen-0.5b` puts it.
pub fn qwen() -> Option<PathBuf> {
    model("FOREBAY_MODEL_QWEN", "Qwen2.5-Coder-0.5B-Instruct.Q4_K_M.gguf")
}

#[expect(clippy::print_stderr, reason = "a test that is skipped says so")]
fn model(variable: &str, file: &str) -> Option<PathBuf> {
    let fetched = Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/../models")).join(file);
    let path = std::env::var_os(variable).map_or(fetched, PathBuf::from);
    if path.exists() {
        return Some(path);
    }
    eprintln!("SKIPPED: no model at {}; run examples/fetch_model.sh", path.display());
    None
}
