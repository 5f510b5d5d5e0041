//! Laws of the pool, with a starter that loads nothing and a clock that stands still while something runs.

use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};

use anyhow::{Result, ensure};

use super::*;

/// A budget that waits are not part of.
const WAIT: Duration = Duration::from_secs(600);

/// Models of the given sizes, and what a starter must never see.
struct Fake {
    sizes: Vec<u64>,
    budget: u64,
    /// Bytes that are in memory.
    taken: AtomicU64,
    /// Requests that use each model.
    used: Vec<AtomicUsize>,
    /// Models by the order in which they were loaded (true) and unloaded.
    events: Mutex<Vec<(usize, bool)>>,
    /// Violations of the laws.
    wrong: Mutex<Vec<String>>,
    /// Models whose loading fails.
    broken: Mutex<BTreeSet<usize>>,
}

impl Starter for Arc<Fake> {
    type Engine = usize;

    fn bytes(&self, index: usize) -> Result<u64> {
        ensure!(self.sizes[index] > 0, "model {index} is not here");
        Ok(self.sizes[index])
    }

    fn start(&self, index: usize) -> Result<usize> {
        let taken = self.taken.fetch_add(self.sizes[index], Ordering::SeqCst) + self.sizes[index];
        if taken > self.budget {
            self.wrong.lock().push(format!("{taken} bytes are taken, {} allowed", self.budget));
        }
        if self.broken.lock().contains(&index) {
            self.taken.fetch_sub(self.sizes[index], Ordering::SeqCst);
            anyhow::bail!("it is broken");
        }
        self.events.lock().push((index, true));
        Ok(index)
    }

    fn stop(&self, index: usize, engine: usize) {
        let used = self.used[index].load(Ordering::SeqCst);
        if used > 0 || engine != index {
            self.wrong.lock().push(format!("model {index} was unloaded during {used} requests"));
        }
        self.events.lock().push((index, false));
        self.taken.fetch_sub(self.sizes[index], Ordering::SeqCst);
    }
}

/// A pool with models of these sizes; the `pinned` ones stay loaded.
fn pool(
    sizes: &[u64],
    pinned: &[usize],
    budget: u64,
    wait: Duration,
) -> (Pool<Arc<Fake>>, Arc<Fake>) {
    pool_with(sizes, budget, wait, |index| (pinned.contains(&index), None))
}

fn pool_with(
    sizes: &[u64],
    budget: u64,
    wait: Duration,
    kept: impl Fn(usize) -> (bool, Option<Duration>),
) -> (Pool<Arc<Fake>>, Arc<Fake>) {
    let fake = Arc::new(Fake {
        sizes: sizes.to_vec(),
        budget,
        taken: AtomicU64::default(),
        used: sizes.iter().map(|_| AtomicUsize::default()).collect(),
        events: Mutex::default(),
        wrong: Mutex::default(),
        broken: Mutex::default(),
    });
    let settings = (0..sizes.len()).map(|index| {
        let (pinned, keep_alive) = kept(index);
        Settings { name: format!("m{index}"), keep_alive, pinned }
    });
    (Pool::new(fake.clone(), settings.collect(), budget, wait), fake)
}

fn later() -> Instant {
    Instant::now() + Duration::from_secs(86_400)
}

/// Uses a model for some time.
async fn ask(pool: &Pool<Arc<Fake>>, index: usize, time: Duration) -> Result<(), Refusal> {
    let lease = pool.acquire(index, later()).await?;
    let used = &pool.starter().used[index];
    used.fetch_add(1, Ordering::SeqCst);
    assert_eq!(*lease.engine(), index);
    tokio::time::sleep(time).await;
    used.fetch_sub(1, Ordering::SeqCst);
    drop(lease);
    Ok(())
}

fn states(pool: &Pool<Arc<Fake>>) -> String {
    let letter = |report: Report| match report.state {
        State::OnDisk => '-',
        State::Loading => 'l',
        State::Loaded => 'L',
        State::Unloading => 'u',
    };
    pool.report().into_iter().map(letter).collect()
}

/// SplitMix64.
struct Random(u64);

impl Random {
    fn below(&mut self, bound: u64) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        (z ^ (z >> 31)) % bound
    }
}

/// One request after another: which models are loaded is what a list in the order of use says.
#[tokio::test(start_paused = true)]
async fn the_model_that_was_not_used_for_the_longest_time_leaves_first() {
    for seed in 0..60 {
        let mut random = Random(seed);
        let count = 2 + random.below(5) as usize;
        let sizes: Vec<u64> = (0..count).map(|_| 1 + random.below(9)).collect();
        let pinned: Vec<usize> = (0..count).filter(|_| random.below(5) == 0).collect();
        let budget = 6 + random.below(16);
        let (pool, fake) = pool(&sizes, &pinned, budget, WAIT);
        // Loaded models, that used last at the end.
        let mut expected: Vec<usize> = Vec::new();
        for _ in 0..60 {
            let index = random.below(count as u64) as usize;
            let asked = ask(&pool, index, Duration::ZERO).await;
            let stay: u64 = expected.iter().filter(|i| pinned.contains(i)).map(|&i| sizes[i]).sum();
            if !expected.contains(&index) && stay + sizes[index] > budget {
                assert!(matches!(asked, Err(Refusal::TooLarge { .. })), "{asked:?}");
                continue;
            }
            asked.unwrap();
            if let Some(at) = expected.iter().position(|&i| i == index) {
                expected.remove(at);
            } else {
                let total = |loaded: &[usize]| loaded.iter().map(|&i| sizes[i]).sum::<u64>();
                while total(&expected) + sizes[index] > budget {
                    let oldest = expected.iter().position(|i| !pinned.contains(i)).unwrap();
                    expected.remove(oldest);
                }
            }
            expected.push(index);
            let loaded = (0..count).map(|i| if expected.contains(&i) { 'L' } else { '-' });
            assert_eq!(states(&pool), loaded.collect::<String>(), "seed {seed}");
        }
        assert_eq!(*fake.wrong.lock(), [""; 0], "seed {seed}");
    }
}

/// Many requests at a time, some of which give up: nothing is taken twice or unloaded in use, all others get
/// their model, and in the end nothing is held.
#[tokio::test(start_paused = true)]
async fn concurrent_requests_never_exceed_the_budget_or_lose_their_model() {
    for seed in 0..40 {
        let mut random = Random(1000 + seed);
        let count = 3 + random.below(4) as usize;
        let sizes: Vec<u64> = (0..count).map(|_| 1 + random.below(5)).collect();
        let budget = 5 + random.below(8);
        let alive = |index: usize| index.is_multiple_of(2).then_some(Duration::from_millis(40));
        let (pool, fake) = pool_with(&sizes, budget, WAIT, |index| (false, alive(index)));
        let mut asking = Vec::new();
        for _ in 0..120 {
            let index = random.below(count as u64) as usize;
            let [start, time, patience] = [300, 30, 200].map(|most| random.below(most));
            let gives_up = random.below(6) == 0;
            let pool = pool.clone();
            asking.push(tokio::spawn(async move {
                tokio::time::sleep(Duration::from_millis(start)).await;
                if gives_up {
                    // Dropped while it waits.
                    let lease = pool.acquire(index, later());
                    let _ = tokio::time::timeout(Duration::from_millis(patience), lease).await;
                    return Ok(());
                }
                ask(&pool, index, Duration::from_millis(time)).await
            }));
        }
        for asked in asking {
            asked.await.unwrap().unwrap_or_else(|refusal| panic!("seed {seed}: {refusal}"));
        }
        assert_eq!(*fake.wrong.lock(), [""; 0], "seed {seed}");
        // Those with a keep-alive leave.
        tokio::time::sleep(Duration::from_secs(1)).await;
        let reports = pool.report();
        assert!(reports.iter().all(|report| report.requests == 0), "{reports:?}");
        for (index, report) in reports.iter().enumerate() {
            let stays = report.state == State::Loaded;
            assert!(stays || report.state == State::OnDisk, "seed {seed}: {report:?}");
            assert!(!(stays && alive(index).is_some()), "seed {seed}: model {index} stayed");
        }
        let loaded: u64 = (0..count)
            .filter(|&index| reports[index].state == State::Loaded)
            .map(|index| sizes[index])
            .sum();
        assert_eq!(fake.taken.load(Ordering::SeqCst), loaded);
    }
}

#[tokio::test(start_paused = true)]
async fn a_model_in_use_stays_and_the_request_that_needs_its_room_is_told_so() {
    let (pool, fake) = pool(&[3, 3], &[], 5, Duration::from_secs(2));
    let lease = pool.acquire(0, later()).await.unwrap();
    let before = Instant::now();
    let refusal = pool.acquire(1, later()).await.err().unwrap();
    assert_eq!(refusal.to_string(), "no room for `m1`, because requests use `m0`");
    assert_eq!(before.elapsed(), Duration::from_secs(2));
    assert_eq!(states(&pool), "L-");
    // With less time than that, the time of the request decides.
    let soon = Instant::now() + Duration::from_secs(1);
    let refusal = pool.acquire(1, soon).await.err().unwrap();
    assert_eq!(refusal, Refusal::Deadline { model: "m1".into() });
    drop(lease);
    ask(&pool, 1, Duration::ZERO).await.unwrap();
    assert_eq!(states(&pool), "-L");
    assert_eq!(*fake.events.lock(), [(0, true), (0, false), (1, true)]);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_always_in_use_gives_way_in_the_end() {
    let (pool, fake) = pool(&[3, 3], &[], 5, WAIT);
    let busy = pool.clone();
    // At any time one of two requests holds the model.
    let stream = |offset| {
        let pool = busy.clone();
        tokio::spawn(async move {
            tokio::time::sleep(Duration::from_millis(offset)).await;
            loop {
                ask(&pool, 0, Duration::from_millis(100)).await.unwrap();
            }
        })
    };
    let streams = [stream(0), stream(50)];
    tokio::time::sleep(Duration::from_secs(1)).await;
    let before = Instant::now();
    ask(&pool, 1, Duration::ZERO).await.unwrap();
    let waited = before.elapsed();
    assert!((PATIENCE..PATIENCE + Duration::from_secs(1)).contains(&waited), "{waited:?}");
    // The others go on.
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert_eq!(states(&pool), "L-");
    streams.iter().for_each(tokio::task::JoinHandle::abort);
    assert_eq!(*fake.wrong.lock(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn an_idle_model_leaves_after_its_keep_alive() {
    let minute = Duration::from_secs(60);
    let kept = |index: usize| (index == 1, Some(minute));
    let (pool, _) = pool_with(&[1, 1], 5, WAIT, kept);
    ask(&pool, 0, 2 * minute).await.unwrap();
    ask(&pool, 1, Duration::ZERO).await.unwrap();
    assert_eq!(states(&pool), "LL");
    assert_eq!(pool.report()[0].expires, Some(minute));
    assert_eq!(pool.report()[1].expires, None, "it is pinned");
    // Each use counts anew.
    tokio::time::sleep(minute / 2).await;
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    tokio::time::sleep(minute * 3 / 4).await;
    assert_eq!(states(&pool), "LL");
    tokio::time::sleep(minute / 2).await;
    assert_eq!(states(&pool), "-L");
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    assert_eq!((pool.report()[0].loads, pool.report()[0].unloads), (2, 1));
}

#[tokio::test(start_paused = true)]
async fn a_load_that_fails_fails_its_requests_only() {
    let (pool, fake) = pool(&[3, 3, 0], &[], 5, WAIT);
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    fake.broken.lock().insert(1);
    let (first, second) =
        tokio::join!(ask(&pool, 1, Duration::ZERO), ask(&pool, 1, Duration::ZERO));
    for refusal in [first, second] {
        let refusal = refusal.unwrap_err().to_string();
        assert_eq!(refusal, "loading `m1` failed: it is broken");
    }
    // Nothing leaves for a model that is not here.
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    let refusal = ask(&pool, 2, Duration::ZERO).await.unwrap_err();
    let problem = "model 2 is not here".into();
    assert_eq!(refusal, Refusal::Absent { model: "m2".into(), problem });
    assert_eq!(states(&pool), "L--");
    fake.broken.lock().clear();
    ask(&pool, 1, Duration::ZERO).await.unwrap();
    assert_eq!(*fake.wrong.lock(), [""; 0]);
}

#[tokio::test(start_paused = true)]
async fn a_model_that_is_loaded_from_the_start_counts_and_stays() {
    let (pool, _) = pool(&[3, 4, 0], &[], 6, WAIT);
    let fixed = pool.add_loaded("fixed", 2, 2);
    assert_eq!(fixed, 3);
    ask(&pool, 1, Duration::ZERO).await.unwrap();
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    assert_eq!(states(&pool), "L--L");
    let lease = pool.acquire(fixed, later()).await.unwrap();
    assert_eq!((*lease.engine(), lease.index()), (2, 3));
    let refusal = Refusal::TooLarge { model: "m1".into(), bytes: 5, free: 4, budget: 6 };
    assert!(refusal.to_string().contains("5 bytes"), "{refusal}");
}

#[tokio::test(start_paused = true)]
async fn a_withdrawn_model_keeps_its_requests_and_gets_no_others() {
    let (pool, fake) = pool(&[3, 3], &[], 5, WAIT);
    let withdrawn = Refusal::Withdrawn { model: "m0".into() };
    let second = Duration::from_secs(1);
    let lease = pool.acquire(0, later()).await.unwrap();
    pool.withdraw(0);
    // The request that has it may ask for it to stay, as it was served then.
    pool.keep(0, None);
    tokio::time::sleep(second).await;
    assert_eq!(states(&pool), "L-");
    assert_eq!(ask(&pool, 0, Duration::ZERO).await.unwrap_err(), withdrawn);
    drop(lease);
    tokio::time::sleep(second).await;
    assert_eq!(states(&pool), "--");
    assert!(pool.is_withdrawn(0) && pool.report()[0].withdrawn && !pool.report()[1].withdrawn);

    // A request that waits for its room learns it at once.
    pool.restore(0);
    let lease = pool.acquire(1, later()).await.unwrap();
    let waiting = pool.clone();
    let waiting = tokio::spawn(async move { ask(&waiting, 0, Duration::ZERO).await });
    tokio::time::sleep(second).await;
    pool.withdraw(0);
    assert_eq!(waiting.await.unwrap().unwrap_err(), withdrawn);
    drop(lease);
    pool.restore(0);
    ask(&pool, 0, Duration::ZERO).await.unwrap();
    tokio::time::sleep(second).await;
    assert_eq!(states(&pool), "L-", "it stays as before");
    assert_eq!(*fake.wrong.lock(), [""; 0]);
}
