//! `steersman chat` and `steersman run` beside a running server.

use std::net::SocketAddr;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use steersman::address::Announced;
use steersman::config::FileConfig;
use steersman::talk::{Server, with_server};

use crate::*;

/// A served model whose name is a path at which nothing is: loading it in this process is an error.
const ABSENT: &str = "./absent.gguf";

/// A running server with `model`; returns its configuration file.
async fn running(model: &str, keys: &[&str]) -> FileConfig {
    let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
    let port = listener.local_addr().unwrap().port();
    let keys = format!("{keys:?}");
    let text = format!("[server]\nport = {port}\napi_keys = {keys}\n");
    let file = FileConfig::parse(&text).unwrap();
    let (engine, _) = engine_of(model, 8, answer);
    let app = steersman::app(engine, &file.server);
    tokio::spawn(async move { axum::serve(listener, app).await.unwrap() });
    file
}

/// Asks for `model` as the commands do. Returns the address and the name that they would use.
async fn talk(file: &FileConfig, server: Server, model: Option<&str>) -> Result<(String, String)> {
    talk_in(tempfile::tempdir().unwrap().path(), file, server, model).await
}

/// As [`talk`], with the data folder `data`.
async fn talk_in(
    data: &Path,
    file: &FileConfig,
    server: Server,
    model: Option<&str>,
) -> Result<(String, String)> {
    let (data, file, model) = (data.to_path_buf(), file.clone(), model.map(str::to_string));
    let ask = move || {
        let read = || Ok((file, data));
        let mut asked = None;
        with_server(&server, model, read, |runtime, client, model| {
            // The server answers this client.
            runtime.block_on(client.models())?;
            asked = Some((client.url().to_string(), model));
            Ok(())
        })?;
        Ok(asked.unwrap())
    };
    tokio::task::spawn_blocking(ask).await.unwrap()
}

/// They loaded a second copy of the model beside the server.
#[tokio::test(flavor = "multi_thread")]
async fn commands_talk_to_the_server_that_runs() {
    let file = running("qwen3:4b", &[]).await;
    let url = format!("http://127.0.0.1:{}", file.server.port);
    for (asked, expected) in [
        (Some("qwen3:4b"), "qwen3:4b"),
        (Some("qwen3"), "qwen3:4b"),
        (Some("mlx-community/Qwen3-4B-4bit"), "qwen3:4b"),
        // The server's first model.
        (None, ""),
    ] {
        let found = talk(&file, Server::default(), asked).await.unwrap();
        assert_eq!(found, (url.clone(), expected.to_string()), "{asked:?}");
    }
}

/// `serve --port 8000` was not found: the configuration of the command has another port.
#[tokio::test(flavor = "multi_thread")]
async fn commands_talk_to_the_server_of_their_data_folder_wherever_it_listens() {
    let served = running("qwen3:4b", &[]).await;
    let data = tempfile::tempdir().unwrap();
    let mut file = FileConfig::default();
    // Nothing listens there.
    file.server.port = 1;
    let asked = Some("qwen3:4b");
    let address: SocketAddr = ([127, 0, 0, 1], served.server.port).into();
    // One that starts is waited for.
    let mut announced = Announced::start(data.path());
    let announced = tokio::spawn(async move {
        tokio::time::sleep(Duration::from_millis(500)).await;
        announced.listen(address);
        announced
    });
    let found = talk_in(data.path(), &file, Server::default(), asked).await.unwrap();
    assert_eq!(found, (format!("http://{address}"), "qwen3:4b".to_string()));
    let of_profile = Some("qwen3:4b@strict");
    let found = talk_in(data.path(), &file, Server::default(), of_profile).await.unwrap();
    assert_eq!(found.1, "qwen3:4b@strict");
    let announced = announced.await.unwrap();
    // The configured address comes first.
    let other = running("qwen3:4b", &[]).await;
    let found = talk_in(data.path(), &other, Server::default(), asked).await.unwrap();
    assert_eq!(found.0, format!("http://127.0.0.1:{}", other.server.port));
    // A server that was killed leaves its address.
    drop(announced);
    let gone = std::net::TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap();
    let mut announced = Announced::start(data.path());
    announced.listen(gone);
    let error = talk_in(data.path(), &file, Server::default(), Some(ABSENT)).await.unwrap_err();
    assert!(format!("{error:#}").contains("absent.gguf"), "{error:#}");
}

#[tokio::test(flavor = "multi_thread")]
async fn an_address_that_is_named_needs_no_configuration_and_no_scheme() {
    let file = running("qwen3:4b", &["sk-a"]).await;
    let address = format!("127.0.0.1:{}", file.server.port);
    let named = Server { url: Some(address.clone()), key: Some("sk-a".into()), local: false };
    let other = FileConfig::default();
    let (url, model) = talk(&other, named, Some("QWEN3:4b")).await.unwrap();
    assert_eq!((url, model.as_str()), (format!("http://{address}"), "qwen3:4b"));
}

#[tokio::test(flavor = "multi_thread")]
async fn the_key_is_that_of_the_configuration_or_asked_for() {
    let file = running("owner/tiny", &["sk-a"]).await;
    assert!(talk(&file, Server::default(), Some("owner/tiny")).await.is_ok());
    let mut without = file.clone();
    without.server.api_keys.clear();
    let error = talk(&without, Server::default(), Some("owner/tiny")).await.unwrap_err();
    let error = format!("{error:#}");
    for words in ["requires a key", "--key", "--local", "401"] {
        assert!(error.contains(words), "`{words}` is not in {error}");
    }
    let key = Server { key: Some("sk-a".into()), ..Server::default() };
    assert!(talk(&without, key, Some("owner/tiny")).await.is_ok());
}

#[tokio::test(flavor = "multi_thread")]
async fn a_model_is_loaded_in_this_process_if_no_server_has_it_or_that_is_asked_for() {
    let file = running(ABSENT, &[]).await;
    assert_eq!(talk(&file, Server::default(), Some(ABSENT)).await.unwrap().1, ABSENT);
    let local = Server { local: true, ..Server::default() };
    let error = |asked: Result<_>| format!("{:#}", asked.map(drop).unwrap_err());
    let asked = talk(&file, local, Some(ABSENT)).await;
    assert_eq!(error(asked), "./absent.gguf does not exist");
    let error_of_other = error(talk(&file, Server::default(), Some("./other.gguf")).await);
    for words in [
        " does not serve ./other.gguf, but ./absent.gguf, ",
        "load it: ./other.gguf does not exist",
    ] {
        assert!(error_of_other.contains(words), "`{words}` is not in {error_of_other}");
    }
    let near = error(talk(&file, Server::default(), Some("absnt.gguf@strict")).await);
    assert!(near.contains("did you mean `./absent.gguf@strict`?"), "{near}");
    // Nobody listens at this address.
    let mut nowhere = FileConfig::default();
    nowhere.server.port = 0;
    assert_eq!(
        error(talk(&nowhere, Server::default(), Some(ABSENT)).await),
        "./absent.gguf does not exist"
    );
    // A name of the configuration is that of its model.
    nowhere.models = FileConfig::parse("[models.small]\npath = './absent.gguf'").unwrap().models;
    let asked = talk(&nowhere, Server::default(), Some("small")).await;
    assert_eq!(error(asked), "./absent.gguf does not exist");
}
