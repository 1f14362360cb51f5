//! Policies: each file turns a model's shape, a capacity and a budget into the settings of the tiers.
//!
//! What a policy keeps, fetches and attends to is said entirely by its [`CacheConfig`]; the tiers, the store and the kernels know
//! no policy by name.

pub mod forebay;
pub mod kvswap;
pub mod load_all;
pub mod window;

use crate::config::{CacheConfig, Policy};
use crate::error::{Error, Result};
use crate::plan::{MemoryPlan, ModelShape, TierSizes, plan_full, plan_tiers};
use forebay_kernels::prefill_attention::KvElement;

/// What a policy fits its settings into.
#[derive(Clone, Copy, Debug)]
pub struct Room {
    /// Shape of the model.
    pub shape: ModelShape,
    /// Tokens that the session may hold.
    pub capacity: usize,
    /// Tokens of the longest prefill.
    pub prefill_tokens: usize,
    /// Direct-I/O alignment of the store.
    pub alignment: usize,
    /// Number format of policy `full`.
    pub element: KvElement,
    /// KV-side bytes.
    pub budget: u64,
}

impl Room {
    /// The plan of `config`.
    pub fn plan(&self, config: &CacheConfig) -> MemoryPlan {
        let sizes = TierSizes::new(&self.shape, config, self.capacity, self.alignment);
        plan_tiers(&self.shape, config, &sizes, self.prefill_tokens)
    }

    /// KV-side bytes of `config`.
    pub fn kv_bytes(&self, config: &CacheConfig) -> u64 {
        self.plan(config).kv_bytes()
    }

    /// The largest `n <= most` for which `config(n)` fits the budget; 0 is taken to fit. Bytes must not fall as `n` rises.
    pub fn largest(&self, most: usize, config: impl Fn(usize) -> CacheConfig) -> usize {
        let (mut fits, mut fails) = (0, most + 1);
        while fails - fits > 1 {
            let middle = fits + (fails - fits) / 2;
            if self.kv_bytes(&config(middle)) <= self.budget {
                fits = middle;
            } else {
                fails = middle;
            }
        }
        fits
    }

    /// `config` if it fits, else the error that names `smallest`.
    pub fn check(&self, policy: Policy, config: CacheConfig, smallest: u64) -> Result<CacheConfig> {
        if self.kv_bytes(&config) <= self.budget {
            return Ok(config);
        }
        Err(Error::Budget { given: self.budget, smallest, context: self.capacity, policy: policy.name() })
    }
}

/// The settings of `policy` for `room`, or the smallest budget that would do. Policy `full` has none.
pub fn settings(policy: Policy, room: &Room) -> Result<Option<CacheConfig>> {
    match policy {
        Policy::Full => {
            let bytes = plan_full(&room.shape, room.capacity, room.prefill_tokens, room.element).kv_bytes();
            if bytes > room.budget {
                let (given, context) = (room.budget, room.capacity);
                return Err(Error::Budget { given, smallest: bytes, context, policy: policy.name() });
            }
            Ok(None)
        }
        Policy::Forebay => forebay::settings(room).map(Some),
        Policy::Kvswap => kvswap::settings(room).map(Some),
        Policy::LoadAll => load_all::settings(room).map(Some),
        Policy::Window => window::settings(room).map(Some),
    }
}
