//! Listening, and stopping in good order.

use std::future::Future;
use std::io::ErrorKind;
use std::time::Duration;

use anyhow::{Context, Result, anyhow};
use axum::Router;
use axum::serve::ListenerExt;
use tokio::net::TcpListener;
use tokio::sync::oneshot;

use crate::config::ServerConfig;

/// Listens on the configured address.
///
/// # Errors
/// When the address is taken or not ours; the message says what to do.
pub async fn listen(config: &ServerConfig) -> Result<TcpListener> {
    let (host, port) = (config.host.as_str(), config.port);
    TcpListener::bind((host, port)).await.map_err(|error| match error.kind() {
        ErrorKind::AddrInUse => anyhow!(
            "port {port} on {host} is in use: is Steersman running already? Stop it, or choose \
             another port with --port"
        ),
        ErrorKind::PermissionDenied => {
            anyhow!("port {port} may not be used by this user; ports from 1024 up may")
        }
        _ => anyhow!(error).context(format!("listening on {host}, port {port}")),
    })
}

/// Serves until `stop` is ready, then lets running requests end, for at most `grace` or until it is
/// asked to stop once more.
///
/// # Errors
/// When the listener fails.
pub async fn run(
    listener: TcpListener,
    app: Router,
    stop: impl Future<Output = ()> + Send + 'static,
    grace: Duration,
) -> Result<()> {
    let (stopping, stopped) = oneshot::channel();
    // Small chunks go out at once; the kernel would hold each back until the last is acknowledged.
    let listener = listener.tap_io(|socket| {
        if let Err(error) = socket.set_nodelay(true) {
            tracing::debug!(%error, "a socket stays slow");
        }
    });
    let graceful = axum::serve(listener, app).with_graceful_shutdown(async move {
        stop.await;
        // The receiver is gone only when serving has ended already.
        let _ = stopping.send(());
    });
    let too_late = async {
        if stopped.await.is_err() {
            // Serving ended by itself; its own branch says how.
            std::future::pending::<()>().await;
        }
        tokio::select! {
            () = tokio::time::sleep(grace) => {}
            // A second Ctrl-C does not want to wait.
            () = asked_to_stop() => {}
        }
    };
    tokio::select! {
        served = graceful => served.context("serving"),
        () = too_late => {
            tracing::warn!("requests were still running, and are cut off");
            Ok(())
        }
    }
}

/// Ready when the process is asked to stop: Ctrl-C, or SIGTERM where there is one.
pub async fn asked_to_stop() {
    let interrupt = async {
        if let Err(error) = tokio::signal::ctrl_c().await {
            tracing::warn!(%error, "Ctrl-C cannot be waited for");
            std::future::pending::<()>().await;
        }
    };
    #[cfg(unix)]
    {
        use tokio::signal::unix::{SignalKind, signal};
        match signal(SignalKind::terminate()) {
            Ok(mut terminate) => tokio::select! {
                () = interrupt => {}
                _ = terminate.recv() => {}
            },
            Err(error) => {
                tracing::warn!(%error, "SIGTERM cannot be waited for");
                interrupt.await;
            }
        }
    }
    #[cfg(not(unix))]
    interrupt.await;
}
