//! temp
use mlx_rs::Array;
use mlx_rs::ops::indexing::argmax_axis;
use mlx_rs::transforms::eval;
use steersman_engine::cache::Span;
use steersman_engine::model::Pass;
#[test]
#[ignore]
fn profile() {
    let rows: usize = std::env::var("ROWS").unwrap().parse().unwrap();
    let n: usize = std::env::var("N").unwrap_or("200".into()).parse().unwrap();
    let folder = steersman_tests::bundled_model();
    let loaded = steersman_engine::model::load(&folder, &Default::default()).unwrap();
    let model = loaded.model;
    let mut cache = model.new_cache().unwrap();
    let tokens: Vec<u32> = (0..600u32).map(|i| 3 + i % 61).collect();
    let mut run = |t: &[u32], cache: &mut steersman_engine::cache::Cache| {
        let ids = Array::from_slice(t, &[t.len() as i32]);
        let h =
            model.forward(&ids, &mut [Span { rows: t.len() as i32, cache }], Pass::WHOLE).unwrap();
        let l = model.logits(&h).unwrap();
        let p = argmax_axis(&l, -1, true).unwrap();
        eval([&p]).unwrap();
    };
    run(&tokens[..300], &mut cache);
    for _ in 0..3 {
        let mut times = vec![];
        for _ in 0..n {
            cache.checkpoint();
            let s = std::time::Instant::now();
            run(&tokens[..rows], &mut cache);
            times.push(s.elapsed().as_secs_f64() * 1e3);
            cache.rewind(300).unwrap();
        }
        times.sort_by(f64::total_cmp);
        println!("rows {rows}: median {:.2} min {:.2}", times[n / 2], times[0]);
    }
}
