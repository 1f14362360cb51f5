//! Which instruction set the kernels use, found at run time.

use std::sync::OnceLock;

/// An instruction set for which the kernels have an implementation.
///
/// Kernels take an `Isa` by value and fall back to [`Isa::Scalar`] when the machine does not have it, so no value of this type
/// can make safe code execute an instruction that is missing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Isa {
    /// Portable Rust; the reference that all others are tested against.
    Scalar,
    /// x86-64 with AVX2, FMA and F16C.
    Avx2,
    /// x86-64 with AVX-512 F, BW, VL, DQ and VNNI, and all that [`Isa::Avx2`] has.
    Avx512,
    /// aarch64 with NEON; the dot-product extension is used where the machine has it.
    Neon,
}

/// Environment variable that replaces the result of [`Isa::best`] by a lesser instruction set of the same machine.
const ISA_ENV: &str = "FOREBAY_ISA";

impl Isa {
    const ALL: [Isa; 4] = [Isa::Scalar, Isa::Avx2, Isa::Avx512, Isa::Neon];

    /// The fastest instruction set of this machine, or the one that `FOREBAY_ISA` (`scalar`, `avx2`, `avx512`, `neon`) names if
    /// the machine has it. Detected once.
    pub fn best() -> Isa {
        static BEST: OnceLock<Isa> = OnceLock::new();
        *BEST.get_or_init(|| {
            let wanted = std::env::var(ISA_ENV).ok();
            let named = Self::ALL.into_iter().find(|isa| wanted.as_deref() == Some(isa.name()) && isa.is_available());
            named.unwrap_or_else(Self::detect)
        })
    }

    fn detect() -> Isa {
        let by_speed = [Isa::Avx512, Isa::Avx2, Isa::Neon];
        by_speed.into_iter().find(|isa| isa.is_available()).unwrap_or(Isa::Scalar)
    }

    /// All instruction sets that this machine can run, [`Isa::Scalar`] first.
    pub fn available() -> Vec<Isa> {
        Self::ALL.into_iter().filter(|isa| isa.is_available()).collect()
    }

    /// Whether this machine can run it.
    pub fn is_available(self) -> bool {
        match self {
            Isa::Scalar => true,
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => has_avx2(),
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => {
                has_avx2()
                    && std::arch::is_x86_feature_detected!("avx512f")
                    && std::arch::is_x86_feature_detected!("avx512bw")
                    && std::arch::is_x86_feature_detected!("avx512vl")
                    && std::arch::is_x86_feature_detected!("avx512dq")
                    && std::arch::is_x86_feature_detected!("avx512vnni")
            }
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
            _ => false,
        }
    }

    /// Itself if the machine has it, else [`Isa::Scalar`]: what every kernel calls before it picks an implementation.
    pub fn usable(self) -> Isa {
        if self.is_available() { self } else { Isa::Scalar }
    }

    /// Lower-case name, as `FOREBAY_ISA` takes it.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

#[cfg(target_arch = "x86_64")]
fn has_avx2() -> bool {
    std::arch::is_x86_feature_detected!("avx2")
        && std::arch::is_x86_feature_detected!("fma")
        && std::arch::is_x86_feature_detected!("f16c")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn best_is_available_and_scalar_is_always_there() {
        assert!(Isa::best().is_available());
        assert_eq!(Isa::available()[0], Isa::Scalar);
        assert!(Isa::available().contains(&Isa::best()));
    }

    #[test]
    fn a_missing_instruction_set_falls_back_to_scalar() {
        for isa in Isa::ALL {
            let expected = if isa.is_available() { isa } else { Isa::Scalar };
            assert_eq!(isa.usable(), expected);
        }
        assert!(!Isa::Avx2.is_available() || !Isa::Neon.is_available(), "no machine is both");
    }
}
