//! Ranks that are threads of one process: they prove the arithmetic of a model in parts without a network.
//!
//! At each sum all threads meet: each brings the numbers of its array, and adds those of all in the order of the ranks. A thread
//! that ends, or whose array has another shape than those of the others, makes the others fail instead of waiting for it.

use std::sync::Arc;

use mlx_rs::{Array, Dtype};
use parking_lot::{Condvar, Mutex};

use super::{Exchange, Ranks};
use crate::error::{Error, Result};

/// The ranks of `count` threads, which is at least 1: one for each. A thread leaves when it drops its last clone.
pub fn in_threads(count: usize) -> Vec<Ranks> {
    if count == 1 {
        return vec![Ranks::alone()];
    }
    let meeting = Arc::new(Meeting {
        table: Mutex::new(Table { brought: vec![None; count], read: 0, has_left: false }),
        changed: Condvar::new(),
    });
    let size = i32::try_from(count).expect("a process has few threads");
    let member = |rank: usize| Arc::new(Member { rank, meeting: meeting.clone() });
    (0i32..).zip(0..count).map(|(index, rank)| Ranks::new(index, size, member(rank))).collect()
}

/// An array on the host. Threads share no arrays of MLX.
#[derive(Debug)]
struct Numbers {
    shape: Vec<i32>,
    dtype: Dtype,
    values: Vec<f32>,
}

#[derive(Debug)]
struct Meeting {
    table: Mutex<Table>,
    changed: Condvar,
}

#[derive(Debug)]
struct Table {
    /// What each rank has brought. Emptied when all have read it.
    brought: Vec<Option<Arc<Numbers>>>,
    /// Number of ranks that have read.
    read: usize,
    has_left: bool,
}

/// A rank at the meeting.
#[derive(Debug)]
struct Member {
    rank: usize,
    meeting: Arc<Meeting>,
}

impl Member {
    /// Brings `x` and returns what each rank has brought, in their order.
    fn meet(&self, x: &Array) -> Result<Vec<Arc<Numbers>>> {
        let wide = x.as_dtype(Dtype::Float32)?.contiguous()?;
        let values = wide.try_as_slice::<f32>().map_err(|e| Error::Array(e.to_string()))?.to_vec();
        let own = Arc::new(Numbers { shape: x.shape().to_vec(), dtype: x.dtype(), values });
        let Meeting { table, changed } = &*self.meeting;
        let mut table = table.lock();
        // Others still read what was brought before.
        while table.brought[self.rank].is_some() {
            changed.wait(&mut table);
        }
        table.brought[self.rank] = Some(own.clone());
        // Nobody has to wake before the last one has come.
        if table.brought.iter().all(Option::is_some) {
            changed.notify_all();
        }
        let all = loop {
            let all: Option<Vec<Arc<Numbers>>> = table.brought.iter().cloned().collect();
            if let Some(all) = all {
                break all;
            }
            if table.has_left {
                return Err(Error::Array("another rank has ended".into()));
            }
            changed.wait(&mut table);
        };
        table.read += 1;
        if table.read == all.len() {
            table.read = 0;
            table.brought.fill(None);
            changed.notify_all();
        }
        drop(table);
        let alike = |other: &Arc<Numbers>| (&other.shape, other.dtype) == (&own.shape, own.dtype);
        match all.iter().position(|other| !alike(other)) {
            Some(rank) => Err(Error::Array(format!(
                "rank {} has {:?} where rank {rank} has {:?}",
                self.rank, own.shape, all[rank].shape
            ))),
            None => Ok(all),
        }
    }
}

impl Exchange for Member {
    fn sum(&self, x: &Array) -> Result<Array> {
        let all = self.meet(x)?;
        let mut sum = all[0].values.clone();
        for other in &all[1..] {
            sum.iter_mut().zip(&other.values).for_each(|(sum, value)| *sum += value);
        }
        Ok(Array::from_slice(&sum, x.shape()).as_dtype(x.dtype())?)
    }

    fn gather(&self, x: &Array) -> Result<Array> {
        let all = self.meet(x)?;
        let mut shape = x.shape().to_vec();
        shape[0] *= i32::try_from(all.len()).expect("a process has few threads");
        let values: Vec<f32> = all.iter().flat_map(|other| &other.values).copied().collect();
        Ok(Array::from_slice(&values, &shape).as_dtype(x.dtype())?)
    }
}

impl Drop for Member {
    fn drop(&mut self) {
        self.meeting.table.lock().has_left = true;
        self.meeting.changed.notify_all();
    }
}

#[cfg(test)]
mod tests {
    use mlx_rs::Device;

    use super::*;

    /// What `run` returns on each of `count` ranks.
    fn on_all<T: Send>(count: usize, run: impl Fn(&Ranks) -> T + Sync) -> Vec<T> {
        std::thread::scope(|scope| {
            let run = &run;
            let threads: Vec<_> = in_threads(count)
                .into_iter()
                .map(|ranks| {
                    scope.spawn(move || {
                        Device::set_default(&Device::cpu());
                        run(&ranks)
                    })
                })
                .collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        })
    }

    fn numbers(array: Result<Array>) -> Vec<f32> {
        array.unwrap().contiguous().unwrap().as_slice::<f32>().to_vec()
    }

    #[test]
    fn all_ranks_get_the_same_sums_and_columns() {
        for count in [1, 2, 3, 8] {
            let results = on_all(count, |ranks| {
                let own = ranks.index() as f32;
                let x = |round: usize| {
                    Array::from_slice(&[own, 10.0 * own, round as f32, 1.0], &[1, 2, 2])
                };
                let sums: Vec<_> = (0..100).map(|round| numbers(ranks.sum(x(round)))).collect();
                (sums, numbers(ranks.gather(x(7))), numbers(ranks.mean(x(7))))
            });
            let all = (0..count).sum::<usize>() as f32;
            let n = count as f32;
            for (sums, columns, mean) in results {
                for (round, sum) in sums.iter().enumerate() {
                    assert_eq!(*sum, [all, 10.0 * all, n * round as f32, n]);
                }
                assert_eq!(mean, [all / n, 10.0 * all / n, 7.0, 1.0]);
                let row = |second: bool| {
                    (0..count).flat_map(move |rank| match second {
                        false => [rank as f32, 10.0 * rank as f32],
                        true => [7.0, 1.0],
                    })
                };
                assert_eq!(columns, row(false).chain(row(true)).collect::<Vec<_>>());
            }
        }
    }

    /// Otherwise the other threads would wait for ever.
    #[test]
    fn a_rank_that_ends_or_differs_makes_the_others_fail() {
        let x = |length: i32| Array::from_slice(&vec![1f32; length as usize], &[length]);
        let errors = on_all(3, |ranks| {
            if ranks.index() == 1 {
                return String::new();
            }
            ranks.sum(x(4)).unwrap_err().to_string()
        });
        assert!(errors[0].contains("another rank has ended"), "{errors:?}");
        assert_eq!(errors[0], errors[2]);
        let errors = on_all(2, |ranks| {
            let length = 4 + ranks.index();
            ranks.sum(x(length)).unwrap_err().to_string()
        });
        assert!(errors[0].contains("rank 0 has [4] where rank 1 has [5]"), "{errors:?}");
    }
}
