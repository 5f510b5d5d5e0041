//! Any processor.

use super::Bytes;
use crate::lanes::portable::Portable;

// SAFETY: each method reads what the trait states.
unsafe impl Bytes for Portable {
    type Floats = Self;
    type V = [u8; 32];

    fn offset(_bits: usize) -> f32 {
        0.0
    }

    #[inline(always)]
    unsafe fn unpack<const BITS: usize>(words: *const u8) -> [[u8; 32]; 2] {
        // SAFETY: the caller's pointer is valid for the 32 or 64 bytes of the chunk.
        unsafe {
            if BITS == 4 {
                let bytes = words.cast::<[u8; 32]>().read_unaligned();
                return [bytes.map(|byte| byte & 15), bytes.map(|byte| byte >> 4)];
            }
            let quarters = words.cast::<[[u8; 16]; 4]>().read_unaligned();
            [0, 1].map(|half| std::array::from_fn(|i| quarters[half + i / 16 * 2][i % 16]))
        }
    }

    #[inline(always)]
    unsafe fn dot<const BITS: usize>(elements: [[u8; 32]; 2], x: *const i8) -> [f32; 4] {
        // SAFETY: the caller's pointer is valid for 64 bytes.
        let x = unsafe { x.cast::<[[i8; 32]; 2]>().read_unaligned() };
        std::array::from_fn(|lane| {
            let mut sum = 0;
            for (elements, x) in elements.iter().zip(&x) {
                for i in 8 * lane..8 * (lane + 1) {
                    sum += i32::from(elements[i]) * i32::from(x[i]);
                }
            }
            sum as f32
        })
    }

    #[inline(always)]
    unsafe fn halves(floats: *const f32) -> [f32; 4] {
        // SAFETY: the caller's pointer is valid for two floats.
        let [a, b] = unsafe { floats.cast::<[f32; 2]>().read() };
        [a, a, b, b]
    }
}
